"""Modules that produce long filters h [N, D, L], the transformed axis last; h at L is the first L taps."""

from hyena_jax.filters.implicit import ImplicitFilter

__all__ = ["ImplicitFilter"]
