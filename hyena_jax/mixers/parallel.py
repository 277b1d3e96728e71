"""`seq` over whole sequences: training and scoring. Axes: B batch, L length."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hyena_jax.mixers.inputs import refuse_segments
from hyena_jax.mixers.sequence import Handed, Sequence
from hyena_jax.ops.documents import documents
from hyena_jax.ops.forms import Forms, forms_for


class Parallel(Sequence):
    """Whole sequences, maybe packed with documents, maybe sharded over a mesh axis; without a memory."""

    def __init__(
        self,
        shape: tuple[int, int],
        segment_ids: jax.Array | None = None,
        sequence_axis: str | None = None,
        forms: Forms | None = None,
        handed: Handed | None = None,
    ):
        """Rows of `shape`, B and L; each run of equal segment_ids [B, L] is a document."""
        self.handed = {} if handed is None else handed
        self.shape, self.segment_ids = shape, segment_ids
        self.sequence_axis, self.forms = sequence_axis, forms or forms_for()
        self.capacity = shape[1]
        self.position = jnp.zeros((), jnp.int32)
        self.index = jnp.arange(shape[1], dtype=jnp.int32)
        self.documents = None if segment_ids is None else documents(segment_ids)
        self.positions = self.index[None] if self.documents is None else self.documents.position

    def carry(
        self,
        name: str,
        empty: Callable[[], Any],
        run: Callable[[Any], tuple[Any, Any]],
        whole: Callable[[], Any] | None = None,
    ) -> Any:
        if whole is not None:
            return whole()
        self.gathers(name)
        return run(empty())[0]

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        return make()

    def starts(self, of_rows: bool = True) -> jax.Array | None:
        changes = None if self.documents is None else self.documents.changes
        if not of_rows:
            return changes
        first = jnp.broadcast_to(self.index == 0, self.shape)
        return first if changes is None else first | changes

    def gathers(self, name: str) -> None:
        if self.sequence_axis is not None:
            message = f"the operator {name!r} has no sharded form: every device gathers the whole sequence"
            warnings.warn(message, stacklevel=3)

    def refuse_documents(self) -> None:
        refuse_segments(self.segment_ids)
