"""Only processes that the tests start have Triton (processes.py)."""

collect_ignore = [
    "compile_worker.py",
    "compiled.py",
    "interpreter_checks.py",
    "interpreter_worker.py",
    "launch_worker.py",
    "memory_checks.py",
    "table.py",
]
