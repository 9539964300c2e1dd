"""The modules of checks import their hosts, which only the processes of hosts.py find."""

collect_ignore_glob = ["*_checks.py"]
