"""Memory that a launch needs while it runs, such as the tensor descriptors that a kernel makes for itself.

Triton asks an allocator for it at every launch. The launches of a workspace run one after another, so one buffer
serves them all, and a captured graph finds it where it was.
"""

from __future__ import annotations

import torch

from ditron_inductor.device.heap import private_cuda_bytes

FIRST_BYTES = 1 << 20
ALIGNMENT = 256
"""The alignment in bytes of every allocation of the driver and of torch. Tensor descriptors need at most 128."""


class Scratch:
    """The scratch memory of a workspace, in the form of Triton's allocators; keeps what a captured graph may hold."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[torch.Tensor] = []

    def __call__(self, size: int, alignment: int, stream: int | None) -> torch.Tensor:
        """Returns uint8 [at least size], for a launch that is ordered after the workspace's last launch."""
        assert alignment <= ALIGNMENT, f"a kernel asks for scratch memory aligned to {alignment} bytes"
        if self._kept and self._kept[-1].numel() >= size:
            return self._kept[-1]
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Use a buffer of the graph itself. Its pool reuses the memory only for what comes later in the graph.
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        nbytes = max(FIRST_BYTES, 1 << (size - 1).bit_length())
        with torch.inference_mode(False), torch.no_grad():
            if self._device.type == "cuda":
                self._kept.append(private_cuda_bytes(self._device, nbytes))
            else:
                self._kept.append(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
        return self._kept[-1]

    def release(self) -> None:
        self._kept = []
