"""A model's tokenizer, and real text in its tokens. Only local files are read."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

from workbench.errors import InvalidInput
from workbench.models.checkpoint import _quiet, _short, _tokens, topics_text
from workbench.models.network.files import NetworkFiles, find_network
from workbench.models.network.gguf_source import NEEDS_GGUF


class TextTokens(NamedTuple):
    """Tokens of a text.

    Attributes:
        ids: token ids.
        bos: what the tokenizer puts before every text; None where it puts nothing.
    """

    ids: list[int]
    bos: int | None


def load_tokenizer(model: str) -> Any:
    """The tokenizer beside a checkpoint's weights, or in its GGUF file, as transformers reads it.

    Raises:
        InvalidInput: the model has no files here, or no tokenizer that can be read.
    """
    files = find_network(model)
    options = _options(files)
    from transformers import AutoTokenizer

    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(
                str(files.folder), local_files_only=True, trust_remote_code=False, **options
            )
    except Exception as error:
        raise InvalidInput(f"model: {model} has no tokenizer that transformers can read ({_short(error)})") from error


def topic_tokens(tokenizer: Any, count: int) -> TextTokens:
    """The first `count` tokens of Python's help topics: English and code, with every Python (fewer where it ends)."""
    ids = _tokens(tokenizer, topics_text(), count)[:count]
    start = tokenizer("a", verbose=False)["input_ids"][:1]
    return TextTokens(ids, start[0] if start == [tokenizer.bos_token_id] else None)


def _options(files: NetworkFiles) -> dict[str, str]:
    if files.folder is None:
        raise InvalidInput(f"model: {files.config.name} has no files on this machine, and so no tokenizer")
    if files.gguf is None:
        return {}
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise InvalidInput(f"model: {NEEDS_GGUF}")
    return {"gguf_file": files.gguf.name}
