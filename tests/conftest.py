import support.tools  # noqa: F401  (reads a variable before any test starts a process)
from hypothesis import settings

settings.register_profile(
    "untimed", deadline=None
)  # how long an example takes says nothing on a machine that is shared
settings.load_profile("untimed")
