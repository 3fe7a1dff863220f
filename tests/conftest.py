import support.tools  # noqa: F401  (reads a variable before any test starts a process)
