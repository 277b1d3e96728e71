"""`seq` that continues a state, and the one state of all mixers. Axes: B batch, T new tokens."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from hyena_jax.mixers.inputs import Shared, is_real
from hyena_jax.mixers.sequence import Handed, Inputs, Sequence
from hyena_jax.ops.forms import Forms, forms_for
from hyena_jax.ops.online_conv import FilterTaps, History
from hyena_jax.system.errors import UserError, require


class MixerState(NamedTuple):
    """The first real position of each row, int32 [B], and the memory of each operator, leaves [B, ...].

    A memory has the name and number of its operator's call in `mix`: `fir_0`, `recur_0`, `recur_1`. In
    `shared` are the position and what `Sequence.once` has computed.
    """

    shared: Shared
    first: jax.Array
    memory: dict[str, Any]


SAME_CALLS = "its calls of `seq` must not depend on the number of tokens"


class Online(Sequence):
    """The T tokens after a state, in one call of `mix`; it collects the memories that operators return."""

    is_online = True

    def __init__(
        self,
        state: MixerState,
        n_tokens: int,
        lengths: jax.Array | None = None,
        forms: Forms | None = None,
        is_step: bool = False,
        capacity: int | None = None,
        handed: Handed | None = None,
    ):
        """The next T = n_tokens tokens, of which the last lengths [B] are real.

        With a `capacity` a sequence begins: each operator makes its memory when it is first called.
        """
        self.state_before, self.is_step, self.capacity = state, is_step, capacity
        self.handed = {} if handed is None else handed
        self.forms = forms or forms_for()
        self.first = state.first if lengths is None else n_tokens - lengths
        self.shape, self.real = (len(state.first), n_tokens), is_real(lengths, n_tokens)
        self.position = state.shared.position
        self.index = self.position + jnp.arange(n_tokens, dtype=jnp.int32)
        self.positions = self.index - self.first[:, None]
        self.constants, self.memory, self.calls = dict(state.shared.constants), {}, Counter()
        self.empty: dict[str, Any] = {}
        self.trace = get_opaque_trace_state(convention="flax")

    @classmethod
    def start(cls, batch_size: int, capacity: int, forms: Forms | None = None) -> "Online":
        """The first token of rows for which a state has room for `capacity` tokens."""
        shared = Shared(jnp.zeros((), jnp.int32), {})
        nothing = MixerState(shared, jnp.zeros(batch_size, jnp.int32), {})
        return cls(nothing, 1, None, forms, True, capacity)

    def initial(self) -> MixerState:
        """The state before the first token, once `mix` has called all operators."""
        return MixerState(Shared(self.position, self.constants), self.first, self.empty)

    def state(self) -> MixerState:
        """The state after these tokens; UserError if `mix` has called fewer operators than before them."""
        missing = sorted(self.state_before.memory.keys() - self.memory.keys())
        if missing:
            raise UserError(f"`mix` did not call {', '.join(missing)} this time: {SAME_CALLS}")
        shared = Shared(self.position + self.shape[1], self.constants)
        return MixerState(shared, self.first, self.memory)

    def carry(
        self,
        name: str,
        empty: Callable[[], Any],
        run: Callable[[Any], tuple[Any, Any]],
        whole: Callable[[], Any] | None = None,
    ) -> Any:
        if get_opaque_trace_state(convention="flax") != self.trace:
            raise UserError(
                f"`mix` called `seq` (for {name!r}) inside of its own scan, vmap, jit or remat: call it"
                " outside, or use seq.scan"
            )
        kind, name = name, self._next(name)
        self.calls[kind] += 1
        if self.capacity is not None:
            before = self.empty[name] = empty()
        elif name in self.state_before.memory:
            before = self.state_before.memory[name]
        else:
            raise UserError(f"`mix` called {name} for the first time after a state began: {SAME_CALLS}")
        # A step waits for its memory, so that full precision costs nothing; by default a TPU has bfloat16's.
        with jax.default_matmul_precision("highest") if self.is_step else nullcontext():
            y, after = run(before)
        shapes = [jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), z) for z in (before, after)]
        must = f"as before, {shapes[0]}"
        require(shapes[0] == shapes[1], f"the memory {name} after these tokens", shapes[1], must)
        self.memory[name] = after
        return y

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        name = self._next(name)
        if self.capacity is not None:
            require(name not in self.constants, "`once`", name, "called once for each `carry` of its name")
            self.constants[name] = make()
        return self.constants[name]

    def starts(self, of_rows: bool = True) -> jax.Array | None:  # a state has one document
        return self.index == self.first[:, None] if of_rows else None

    def _next(self, name: str) -> str:
        """The name and number of the next memory of this name."""
        return f"{name}_{self.calls[name]}"


def map_histories(function: Callable[[History], History], tree: Any) -> Any:
    """A mixer's or a model's state with `function`, such as `online_conv.absorb`, applied to the history of
    each long convolution."""

    def mapped(node: Any) -> Any:
        if not isinstance(node, MixerState):
            return node
        (position, constants), memory = node.shared, dict(node.memory)
        constants = dict(constants)
        for name, kept in node.shared.constants.items():
            if isinstance(kept, FilterTaps):
                history = function(History(kept, position, node.first, *memory[name]))
                constants[name], memory[name] = history.filter, Inputs(history.inputs, history.later)
        return MixerState(Shared(position, constants), node.first, memory)

    return jax.tree.map(mapped, tree, is_leaf=lambda node: isinstance(node, MixerState))


def has_tiles(tree: Any) -> bool:
    """Whether tiles are open in a mixer's or a model's state."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Inputs))
    return any(isinstance(node, Inputs) and node.later is not None for node in nodes)
