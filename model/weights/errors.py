"""The one error of everything between a model's name and its tensors."""


class CheckpointError(Exception):
    """A model cannot be found, described or loaded: one line that names the file, and the field or tensor."""

    exit_code = 65
    """EX_DATAERR of sysexits.h: starting again will not help."""
