"""How a query is: running, stopped, stale or failing, from what is stored; for the commands and the page."""
