"""Writes the pages of the public names, from their docstrings, with pdoc.

python tests/programs/api_page.py build/api

Public is what an `__all__` lists: that of `hyena_jax`, or that of a package in it. Where a package lists its
modules, as `hyena_jax.ops` does, public are their names without an underscore.
"""

import importlib
import inspect
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import hyena_jax
from hyena_jax.config import Between


def packages() -> list[str]:
    """`hyena_jax`, and the packages in it whose `__init__` has an `__all__`."""
    found = ["hyena_jax"]
    for _, name, is_package in pkgutil.iter_modules(hyena_jax.__path__, "hyena_jax."):
        if is_package and hasattr(importlib.import_module(name), "__all__"):
            found.append(name)
    return found


def public_modules() -> Iterator[str]:
    """The packages, and the modules that they list."""
    for package in packages():
        yield package
        names = {name for _, name, _ in pkgutil.iter_modules(importlib.import_module(package).__path__)}
        if package != "hyena_jax":  # whose functions `train` and `compare` have the names of no module
            yield from sorted(f"{package}.{name}" for name in names & set(sys.modules[package].__all__))


def public_names() -> Iterator[tuple[str, object]]:
    """Dotted names of what is public, other than modules, and what they name."""
    places = list(public_modules())
    for place in places:
        module = importlib.import_module(place)
        own = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == place
        ]
        for name in getattr(module, "__all__", own):
            if f"{place}.{name}" not in places:
                yield f"{place}.{name}", getattr(module, name)


def write(folder: Path) -> None:
    """Writes the pages, and warns of what pdoc cannot read. Changes pdoc and Python's `inspect`."""
    import flax.linen as nn
    import jax
    import optax
    import pdoc
    from pdoc import doc, docstrings, render_helpers

    for name in hyena_jax.__all__:  # pdoc reads a module's dictionary, which has a name after its first use
        setattr(hyena_jax, name, getattr(hyena_jax, name))
    # Annotations as they are written: pdoc would print the places of definitions.
    Between.__repr__ = Between.__str__
    plain = inspect.formatannotation
    written = {
        plain(optax.Params): "optax.Params",
        plain(jax.Array): "jax.Array",
        plain(nn.Module): "flax.linen.Module",
        "typing.": "",
    }

    def short(text: str) -> str:
        for place, name in written.items():
            text = text.replace(place, name)
        return text

    inspect.formatannotation = doc.formatannotation = lambda *args, **options: short(plain(*args, **options))
    sys.modules["np"] = np  # of the annotations of a named tuple whose file imports NumPy late
    # The parameters of a module, which are trained, are not arguments; 2*H*K has no word in italics.
    del docstrings.GOOGLE_LIST_SECTION_ALIASES["Parameters"]
    docstrings.GOOGLE_LIST_SECTIONS.append("Parameters")
    render_helpers.markdown_extensions["middle-word-em"] = {"allowed": False}
    pdoc.render.configure(docformat="google", footer_text="")

    def tidy(described: doc.Class) -> None:
        """Leaves out what Flax says of every module, and Python of every named tuple."""
        is_module = issubclass(described.obj, nn.Module)
        of_flax = {"name", "parent", "scope", "setup"} if is_module else ()
        for name, member in list(described.members.items()):
            if name in of_flax or not member.taken_from[0].startswith("hyena_jax"):
                del described.members[name]
            elif member.docstring.startswith(("Alias for field number", "Create new instance of")):
                member.docstring = ""
            elif is_module and name == "__init__":
                fields = member.signature.parameters.values()
                ours = [field for field in fields if field.name not in of_flax]
                member.signature = member.signature.replace(parameters=ours)

    with warnings.catch_warnings():
        # optax.Params names itself in its own definition.
        warnings.filterwarnings("ignore", r"Error parsing type annotation.*ArrayTree", UserWarning)
        for place in public_modules():
            for described in doc.Module.from_name(place).members.values():
                if isinstance(described, doc.Variable):
                    described.default_value_str = short(described.default_value_str)
                elif isinstance(described, doc.Class):
                    tidy(described)
        first, *others = map(doc.Module.from_name, packages())
        first.submodules = others  # in its list of contents
        pdoc.pdoc(*packages(), output_directory=folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
