"""Programs that show how holdfast is used; each folder is one."""
