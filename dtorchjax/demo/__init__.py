"""A byte-level GPT in plain flax NNX, trained under any placements: `dtorchjax train`.

model.py and data.py are ordinary single-device JAX and know nothing of meshes; placements.py says
where parameters live; train.py puts the three together.
"""


class UsageError(ValueError):
    """What the user asked for cannot be done; the message is one line and says what to change."""
