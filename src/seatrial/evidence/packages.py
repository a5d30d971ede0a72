"""Which Python packages a checkout provides, by looking at its directories.

- `src/<package>/__init__.py` makes `src` the import root; otherwise the checkout itself is.
- A directory without `__init__.py` that holds packages is a namespace: `src/megatron/bridge` provides `megatron.bridge`.
  Without a `src`, namespaces count only where there is no ordinary package: `recipes/x` beside the product is none.
- A checkout may provide none; then its import cannot be proven, and both values are empty.
"""

from __future__ import annotations

from pathlib import Path

_NOT_PRODUCTS = (
    "test tests testing doc docs example examples script scripts bench benchmark benchmarks tool tools build dist "
    "ci docker vendor third_party thirdparty node_modules site venv env outputs results logs data wandb experiments"
)


def provided(root: Path) -> tuple[str | None, tuple[str, ...]]:
    """The import root and the packages of the checkout at `root`."""
    source = root / "src"
    if source.is_dir() and not (source / "__init__.py").is_file():
        ordinary, namespaces = _scan(source)
        if ordinary or namespaces:
            return str(source), tuple(sorted(ordinary + namespaces))
    ordinary, namespaces = _scan(root)
    packages = tuple(sorted(ordinary or namespaces))
    return (str(root), packages) if packages else (None, ())


def _scan(root: Path) -> tuple[list[str], list[str]]:
    """Ordinary packages below `root`, and packages one level down in namespaces."""
    ordinary: list[str] = []
    namespaces: list[str] = []
    for directory in _directories(root):
        if directory.name in _NOT_PRODUCTS.split():
            continue
        if (directory / "__init__.py").is_file():
            ordinary.append(directory.name)
        else:
            namespaces += [f"{directory.name}.{inner.name}" for inner in _directories(directory) if (inner / "__init__.py").is_file()]
    return ordinary, namespaces


def _directories(root: Path) -> list[Path]:
    """Directories whose name can be imported; private ones are no products, and from unreadable ones nothing can be imported."""
    try:
        entries = sorted(root.iterdir())
    except PermissionError:
        return []
    return [entry for entry in entries if entry.name.isidentifier() and not entry.name.startswith("_") and entry.is_dir()]
