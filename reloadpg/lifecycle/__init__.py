"""The lifecycle of a job's reloadable groups: install, offload, reload, and what they report."""
