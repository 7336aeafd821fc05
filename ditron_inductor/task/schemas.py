"""What the schemas of the Task ops have in common."""

from __future__ import annotations

SITE = "int world_size, str group_name, str site, str strategy, int workspace_limit, float timeout_s"
"""The arguments of a site, behind an op's own."""


def required_behind_token(schema: str) -> int:
    """How many arguments stand behind the token and have no default: every call gives them."""
    import torch

    arguments = torch._C.parse_schema(f"op{schema}").arguments
    place = [argument.name for argument in arguments].index("token")
    return sum(not argument.has_default_value() for argument in arguments[place + 1 :])
