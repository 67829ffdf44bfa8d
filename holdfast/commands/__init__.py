"""The commands, which `holdfast.cli` lists; bench, demo and ui have folders of their own."""
