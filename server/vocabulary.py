"""The bytes behind each token, for the decoders that Llama-class tokenizers use.

A stream of tokens can only be turned into text piece by piece if a token always stands for the same bytes. That holds
for byte-level BPE (Llama 3, Qwen, SmolLM) and for SentencePiece with byte fallback (Llama 2, Mistral); other decoders,
which rewrite a token by its neighbours, are refused.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class TokenizerError(Exception):
    """A tokenizer cannot be found, read or used: one line that names the file and the reason."""

    exit_code = 65
    """EX_DATAERR of sysexits.h: starting again will not help."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as characters: printable Latin-1 is itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
"""The byte that each character of a byte-level token stands for."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """How the string of one token becomes bytes, and what is stripped from the text of a whole sequence."""

    byte_level: bool = False
    """Tokens are spelled in GPT-2's byte alphabet."""
    byte_fallback: bool = False
    """Tokens such as <0xE4> stand for one byte."""
    replacements: tuple[tuple[str, str], ...] = ()
    strip: str = ""
    """A character that is removed from the beginning of the text, `strip_count` times at most."""
    strip_count: int = 0

    def encode(self, piece: str) -> bytes:
        """Return the bytes of a token, given its string in the vocabulary."""
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        if self.byte_level and all(char in BYTE_OF for char in piece):
            return bytes(BYTE_OF[char] for char in piece)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes((int(match[1], 16),))
        return piece.encode()


def piece_decoder(specification: Any) -> PieceDecoder:
    """Read the `decoder` of a tokenizer.json. Raises TokenizerError if tokens have no bytes of their own in it."""
    match specification:
        case {"type": "Sequence", "decoders": [*steps]}:
            return _chain(steps)
        case {"type": str()}:
            return _chain([specification])
        case _:
            raise TokenizerError("the tokenizer has no decoder: its tokens cannot be turned back into text")


def _chain(steps: Iterable[Any]) -> PieceDecoder:
    """Combine decoder steps. Replacements act on tokens, so they must precede byte fallback; stripping follows Fuse."""
    byte_level = byte_fallback = fused = False
    replacements: list[tuple[str, str]] = []
    strip, strip_count = "", 0
    for step in steps:
        match step:
            case {"type": "ByteLevel"} if not byte_fallback and not fused:
                byte_level = fused = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not byte_fallback:
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0} if fused and not strip:
                strip, strip_count = char, start
            case _:
                kind = step.get("type") if isinstance(step, dict) else step
                raise TokenizerError(
                    f"decoder step {kind!r} of the tokenizer is not supported in this place: "
                    "only byte-level BPE and SentencePiece with byte fallback are served"
                )
    return PieceDecoder(byte_level, byte_fallback, tuple(replacements), strip, strip_count)
