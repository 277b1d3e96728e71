"""The operators as plain NumPy float64 loops: oracles for the tests, to be read next to the papers.

The oracle of a mixer, which `hyena_jax.config.mixers` names, is a function

    oracle(config, params, x, max_len, segment_ids) -> y [B, L, D]

    config       the mixer's config, of which only the fields are read
    params       nested dictionaries of the mixer's module, as NumPy arrays
    x            [B, L, D]
    max_len      Lmax, the length that long filters are defined for
    segment_ids  [B, L], the id of each token's document; no token reads another document

The oracle of a mixer whose layers hand values on has the argument `handed`, a dict that all layers of a model
share. The oracle of a mixer with a long filter has a sixth argument, `long_filter`: the function of
`hyena_jax.reference.filters` for the filter in `config`.
"""
