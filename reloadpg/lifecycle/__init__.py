"""The lifecycle of a job's reloadable groups: install, offload, reload, recover, and reports.

``offload``, ``reload`` and ``recover`` each read from top to bottom, and share ``operation``.
"""
