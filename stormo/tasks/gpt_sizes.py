"""The sizes of the GPT by name, and their arithmetic; without torch, as plans are made without it."""

from __future__ import annotations

from dataclasses import dataclass


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
        skipped; embeddings are read, not multiplied, and nothing that is computed anew is counted.
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
