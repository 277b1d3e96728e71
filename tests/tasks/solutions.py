"""Every task solved by its definition: plain loops over the inputs of a row, independent of how it was drawn.

A solution (inputs, config) -> {position: answer} names every scored position of a test row and no other.
"""

import itertools


def recall(x, config):
    values = dict(zip(x[:-2:2], x[1:-2:2], strict=True))
    return {len(x) - 1: values[x[-1]]}


def mqar(x, config):
    shown, found = {}, {}
    for i in range(0, 2 * config.n_pairs, 2):
        shown[x[i]] = x[i + 1]
    for i in range(2 * config.n_pairs, len(x), 2):
        if x[i] in shown:
            found[i] = shown[x[i]]
    return found


def induction(x, config):
    first = x.index(config.vocab_size - 1)
    return {len(x) - 1: x[first + 1]}


def selective_copying(x, config):
    data = [i for i in x if i > 1]
    return dict(zip([p for p, i in enumerate(x) if i == 1], data, strict=True))


def memorisation(x, config):
    marker = config.vocab_size - 1
    data = [i for i in x if 0 < i < marker]
    return dict(zip([p for p, i in enumerate(x) if i == marker], data, strict=True))


def text(x, config):
    signs = "abcdefghijklmnopqrstuvwxyz"[: config.n_letters] + "$|.*"
    return "".join(signs[i] for i in x), signs


def copying(x, config):
    shown, signs = text(x, config)
    string = shown[1 : shown.index("|")]
    start = shown.index("|")
    assert shown[start + 1 :].startswith(string)
    return {start + i: signs.index(c) for i, c in enumerate(string + ".")}


def prefix_ngram(x, config):
    shown, signs = text(x, config)
    gram, string, _ = shown[1:].split("|")
    answer = string[string.index(gram) + len(gram) :][: config.answer_len]
    start = len(gram) + len(string) + 2
    return {start + i: signs.index(c) for i, c in enumerate(answer + ".")}


def mad_recall(x, config):
    """Noise pairs are known by their first id."""
    found, values = {}, {}
    for i in range(0, len(x), 2):
        key = x[i]
        if key < config.n_plain // 2:
            if key in values:
                found[i] = values[key]
            elif i + 1 < len(x):
                values[key] = x[i + 1]
    return found


def mad_fuzzy_recall(x, config):
    """Keys have `motif` ids in a test row; the last value is cut off by the shift, but was shown before."""
    half = (config.vocab_size - 1) // 2
    rest = list(itertools.dropwhile(lambda i: i == config.vocab_size - 1, x))
    at, found, values = len(x) - len(rest), {}, {}
    for is_key, run in itertools.groupby(rest, lambda i: i < half):
        run = tuple(run)
        if is_key:
            key = run
            for j, answer in enumerate(values.get(key, ())):
                found[at + len(key) - 1 + j] = answer
        elif key not in values:
            values[key] = run
        at += len(run)
    return found


def mad_selective_copying(x, config):
    marker = x.index(config.vocab_size - 1)
    data = [i for i in x[:marker] if i < config.vocab_size - 2]
    return {marker + 1 + i: d for i, d in enumerate(data)}


def mad_compression(x, config):
    return dict(enumerate(x))


def parity(x, config):
    bits = [i - 1 for i in itertools.takewhile(bool, x)]
    if not config.every_position:
        return {len(bits) - 1: 2 if sum(bits) % 2 else 1}
    found, state = {}, 0
    for i, bit in enumerate(bits):
        state ^= bit
        found[i] = state
    return found


def modular_arithmetic(x, config):
    """Python's own arithmetic."""
    end = x.index(4)
    expression = "".join("+-*"[i - 1] if i < 4 else f"({i - 5})" for i in x[:end])
    return {end: 5 + eval(expression) % config.modulus}


def modular_addition(x, config):
    return {i: sum(x[: i + 1]) % config.modulus for i in range(len(x))}


def permutation_words(x, config):
    n = int(config.group[1:])
    listed = list(itertools.permutations(range(n)))
    if config.group[0] == "a":
        listed = [p for p in listed if sum(p[a] > p[b] for b in range(n) for a in range(b)) % 2 == 0]
    found, product = {}, list(range(n))
    for i, x_i in enumerate(x):
        product = [product[j] for j in listed[x_i]]
        found[i] = listed.index(tuple(product))
    return found


def majority(x, config):
    ones, bits = x.count(1), len(x) - 1
    return {bits: 1 if ones > bits - ones else 0}


def counting(x, config):
    return {i: min(x[: i + 1].count(x[i]), config.cap) for i in range(len(x))}


def addition(x, config):
    n = config.n_digits
    a, b = (int("".join(map(str, x[i * n : (i + 1) * n]))) for i in (0, 1))
    return {2 * n - 1 + i: int(c) for i, c in enumerate(f"{a + b:0{n + 1}d}")}


SOLUTIONS = {"mad_noisy_recall": mad_recall} | {
    solution.__name__: solution
    for solution in (
        *(recall, mqar, induction, selective_copying, memorisation, copying, prefix_ngram),
        *(mad_recall, mad_fuzzy_recall, mad_selective_copying, mad_compression),
        *(parity, modular_arithmetic, modular_addition, permutation_words, majority, counting, addition),
    )
}
