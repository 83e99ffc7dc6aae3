"""The second reference job: a GPT that predicts the next byte of Python's own standard library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stormo.config.plan import Facts
from stormo.config.schema import option
from stormo.errors import SettingError, pluralize, unknown_name
from stormo.tasks.python_source import Corpus, read_corpus
from stormo.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stormo.data.tensors import TensorData

VOCABULARY = 256  # every byte is a token


@dataclass(frozen=True, slots=True)
class Size:
    """One preset."""

    num_layers: int
    width: int
    num_heads: int
    block: int  # tokens that the model sees at once
    train_bytes: int | None = None  # of the corpus, unless set; None is all

    def num_parameters(self, *, block: int, vocabulary: int) -> int:
        """All weights: blocks with their two norms, the two embeddings, the last norm and the head."""
        width = self.width
        return self.num_layers * (12 * width**2 + 4 * width) + (2 * vocabulary + block + 2) * width

    def training_flops(self, *, block: int, vocabulary: int) -> float:
        """Operations of forward and backward for one window of `block` tokens.

        By the convention of Chowdhery et al. (arXiv 2204.02311, appendix B): 6 for each weight of a matrix product and
        token, 12 × layers × width × block for attention, which is counted in full although the causal half of it is
        skipped; embeddings are read, not multiplied, and recomputation is not counted.
        """
        matrix_weights = 12 * self.num_layers * self.width**2 + vocabulary * self.width
        return float((6 * matrix_weights + 12 * self.num_layers * self.width * block) * block)


# Heads of 128 from 125m on: the kernels of attention are at their best there, and 8, 16 or 32 heads divide by any usual
# number of devices.
SIZES: dict[str, Size] = {
    "tiny": Size(5, 128, 4, 128, train_bytes=2**18),
    "small": Size(6, 384, 6, 256),
    "medium": Size(12, 512, 8, 512),
    "125m": Size(10, 1024, 8, 1024),
    "350m": Size(28, 1024, 8, 1024),
    "1b": Size(20, 2048, 16, 2048),
    "2.7b": Size(34, 2560, 20, 2048),
    "6.7b": Size(32, 4096, 32, 2048),
    "13b": Size(40, 5120, 40, 2048),
}


@dataclass(frozen=True, kw_only=True)
class LanguageModelOptions:
    """Options of language-model."""

    preset: str = option("tiny", f"size of the model: {', '.join(SIZES)}")
    block: int | None = option(None, "bytes that the model sees at once; default the preset's, 128 to 2048")
    dropout: float = option(0.0, "dropout in attention and after each layer")
    data_folder: str | None = option(
        None, "folder of *.py or *.txt files to train on; default the sources of Python's standard library"
    )
    train_bytes: int | None = option(None, "train on so many bytes, taken evenly from all; default all (tiny: 262144)")
    validation_bytes: int = option(2**18, "validate on so many bytes, taken evenly from all")


class LanguageModel(Task):
    """Windows of `block` bytes; the loss is in nats per byte."""

    name = "language-model"
    Options: ClassVar[type[Any]] = LanguageModelOptions
    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 8,
        "optimizer": "adamw",
        "base_lr": 1e-3,
        "lr_rule": "sqrt",  # Adam divides by the gradient noise, which falls with the root of the batch
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "warmup_epochs": 0.5,
        "warmup_from": 0.1,
        "decay": "cosine",
        "epochs": 4,
        "validation_batch_size": 32,
    }

    def __init__(self, options: LanguageModelOptions) -> None:
        super().__init__(options)
        if options.preset not in SIZES:
            raise unknown_name("--task.preset", options.preset, SIZES)
        self.size = SIZES[options.preset]
        self.block = self.size.block if options.block is None else options.block
        self._corpus: Corpus | None = None
        _check(options, self.block)

    def facts(self) -> Facts:
        """Known from the corpus alone, without the model."""
        corpus, (num_train, num_validation) = self._read(), self._num_windows()
        return Facts(
            num_train=num_train,
            num_validation=num_validation,
            flops_per_sample=self.size.training_flops(block=self.block, vocabulary=VOCABULARY),
            compile_saves=0.25,  # an estimate: norms, GELU and residual sums become one kernel each
            train_bytes=num_train * (self.block + 1),
            unit="tokens",
            units_per_sample=self.block,
            has_accuracy=False,
            has_convolutions=False,
            has_batch_norms=False,
            data=f"{num_train * self.block} bytes of the {pluralize(corpus.num_files, 'file')} of {corpus.origin}",
            data_sha256=corpus.sha256,
        )

    def model(self) -> nn.Module:
        """A GPT of the preset's size."""
        from stormo.tasks.gpt import Gpt

        return Gpt(self.size, block=self.block, vocabulary=VOCABULARY, dropout=self.options.dropout)

    def pieces(self, model: nn.Module) -> Sequence[Any] | None:
        """The embeddings, every block, and the last norm with the head."""
        from stormo.tasks.gpt import Gpt, embed, score

        if not isinstance(model, Gpt):
            return None  # a subclass has another model
        return [
            partial(embed, model.tokens, model.positions, model.dropout),
            *model.blocks,
            partial(score, model.norm, model.head),
        ]

    def train_data(self) -> TensorData:
        """Windows as bytes, in memory."""
        return self._windows(self._read().train, self._num_windows()[0])

    def validation_data(self) -> TensorData:
        """The same for validation."""
        return self._windows(self._read().validation, self._num_windows()[1])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        from torch.nn.functional import cross_entropy

        tokens = batch[0].long()
        return cross_entropy(_scores(model, tokens), tokens[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Sums over the windows of each one's mean."""
        from torch.nn.functional import cross_entropy

        tokens = batch[0].long()
        scores, targets = _scores(model, tokens), tokens[:, 1:].flatten()
        nats = cross_entropy(scores, targets, reduction="sum").double() / self.block
        return {
            "loss": nats,
            "bits_per_byte": nats / math.log(2),
            "next_byte_accuracy": (scores.argmax(dim=1) == targets).sum().double() / self.block,
        }

    def _read(self) -> Corpus:
        if self._corpus is None:
            folder = self.options.data_folder
            self._corpus = read_corpus(Path(folder) if folder else None)
        return self._corpus

    def _num_windows(self) -> tuple[int, int]:
        """How many windows the options ask for, for training and for validation."""
        corpus, options = self._read(), self.options
        train_bytes = self.size.train_bytes if options.train_bytes is None else options.train_bytes
        counts = []
        for name, part, most in (
            ("train", corpus.train, train_bytes),
            ("validation", corpus.validation, options.validation_bytes),
        ):
            num_bytes = len(part) if most is None else min(most, len(part))
            if num_bytes <= self.block:
                raise SettingError(
                    f"windows of {self.block} + 1 bytes were asked for",
                    f"the {name} part has {pluralize(num_bytes, 'byte')}",
                    f"set a smaller --task.block, or a larger --task.{name}-bytes or --task.data-folder",
                )
            counts.append((num_bytes - 1) // self.block)
        return counts[0], counts[1]

    def _windows(self, part: bytes, num_windows: int) -> TensorData:
        import torch

        from stormo.data.tensors import TensorData

        # A copy, as torch wants writable memory.
        stream = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        # A window's last byte, which is only predicted, is the next one's first: each byte is predicted once.
        every = stream.unfold(0, self.block + 1, self.block)
        # Not all: every n-th, as the first ones would be a few files only.
        return TensorData(every[torch.arange(num_windows) * len(every) // num_windows])


def _scores(model: nn.Module, tokens: Tensor) -> Tensor:
    """The scores of every next byte, [n × block, 256], in fp32 at least: a 16-bit softmax loses digits."""
    scores: Tensor = model(tokens[:, :-1]).flatten(0, 1)
    return scores.float() if scores.dtype.itemsize < 4 else scores


def _check(options: LanguageModelOptions, block: int) -> None:
    if not 0 <= options.dropout < 1:
        raise SettingError(
            f"--task.dropout {options.dropout:g} was set", "it must lie in [0, 1)", "set --task.dropout 0.1"
        )
    for flag, value in (
        ("block", block),
        ("train-bytes", options.train_bytes),
        ("validation-bytes", options.validation_bytes),
    ):
        if value is not None and value < 1:
            raise SettingError(f"--task.{flag} {value} was set", "it must be at least 1", f"set --task.{flag} 1024")
