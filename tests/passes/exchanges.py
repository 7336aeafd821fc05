"""All-to-alls of heads and sequence as programs write them, for tests of both fusions. W ranks, h heads on each.

Those of `TO_HEADS` take [B, S, W*h, D] of every rank to [B, W*S, h, D]; those of `TO_ROWS` the other way round.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.passes.graphs import WORLD_SIZE, all_to_all, group_name

Form = Callable[[torch.Tensor], torch.Tensor]


def heads_sequence_first(x: torch.Tensor) -> torch.Tensor:
    B, S, H, D = x.shape
    sent = x.reshape(B, S, WORLD_SIZE, H // WORLD_SIZE, D).transpose(0, 2).contiguous()
    came = all_to_all(sent).reshape(WORLD_SIZE * S, B, H // WORLD_SIZE, D)
    return came.transpose(0, 1).contiguous()


def heads_batch_first(x: torch.Tensor) -> torch.Tensor:
    B, S, H, D = x.shape
    sent = x.view(B, S, WORLD_SIZE, H // WORLD_SIZE, D).permute(2, 0, 1, 3, 4).contiguous()
    return all_to_all(sent).permute(1, 0, 2, 3, 4).reshape(B, WORLD_SIZE * S, H // WORLD_SIZE, D)


def heads_by_cat(x: torch.Tensor) -> torch.Tensor:
    came = all_to_all(torch.cat(torch.chunk(x, WORLD_SIZE, 2)))
    return torch.cat(torch.chunk(came, WORLD_SIZE), 1)


def heads_by_shard_dim(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops._dtensor.shard_dim_alltoall(x, 1, 2, group_name())
    return out


def rows_sequence_first(x: torch.Tensor) -> torch.Tensor:
    B, S, h, D = x.shape
    sent = x.reshape(B, WORLD_SIZE, S // WORLD_SIZE, h, D).transpose(0, 3).transpose(0, 1).contiguous()
    came = all_to_all(sent.reshape(WORLD_SIZE, h, S // WORLD_SIZE, B, D))
    came = came.reshape(WORLD_SIZE * h, S // WORLD_SIZE, B, D)
    return came.transpose(0, 2).contiguous()


def rows_batch_first(x: torch.Tensor) -> torch.Tensor:
    B, S, h, D = x.shape
    sent = x.view(B, WORLD_SIZE, S // WORLD_SIZE, h, D).transpose(0, 1).contiguous()
    return all_to_all(sent).permute(1, 2, 0, 3, 4).reshape(B, S // WORLD_SIZE, WORLD_SIZE * h, D)


def rows_by_cat(x: torch.Tensor) -> torch.Tensor:
    came = all_to_all(torch.cat(torch.chunk(x, WORLD_SIZE, 1)))
    return torch.cat(torch.chunk(came, WORLD_SIZE), 2)


def rows_by_shard_dim(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops._dtensor.shard_dim_alltoall(x, 2, 1, group_name())
    return out


TO_HEADS: tuple[Form, ...] = (heads_sequence_first, heads_batch_first, heads_by_cat, heads_by_shard_dim)
TO_ROWS: tuple[Form, ...] = (rows_sequence_first, rows_batch_first, rows_by_cat, rows_by_shard_dim)
