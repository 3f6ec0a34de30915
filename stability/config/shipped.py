"""Where the files are that come with this package: studies, presets, scripts, experiments, pages.

In a clone they lie beside the package; the wheel holds them in `stability/configs`,
`stability/examples`, `stability/docs` and `stability_experiments`. Leaves out what is in them.
"""

from pathlib import Path

__all__ = ["configs", "docs", "examples", "experiments", "kernels"]

_PACKAGE = Path(__file__).parents[1]


def configs() -> Path:
    """Return the folder of the studies and model presets that are shipped."""
    return _there("configs", _PACKAGE / "configs", _PACKAGE.parent / "configs")


def docs() -> Path:
    """Return the folder of the pages of the documentation."""
    return _there("docs", _PACKAGE / "docs", _PACKAGE.parent / "docs")


def examples() -> Path:
    """Return the folder of the scripts that know nothing of this package."""
    return _there("examples", _PACKAGE / "examples", _PACKAGE.parent / "examples")


def experiments() -> Path:
    """Return the folder of the experiments; what holds it is where their imports begin."""
    installed = _PACKAGE.parent / "stability_experiments" / "experiments"
    return _there("experiments", installed, _PACKAGE.parent / "experiments")


def kernels() -> Path:
    """Return the folder of the package of attention kernels."""
    name = "attention_kernels"
    return _there(name, _PACKAGE.parent / name, _PACKAGE.parent / "kernels" / name)


def _there(name: str, *folders: Path) -> Path:
    for folder in folders:
        if folder.is_dir():
            return folder
    raise ValueError(
        f"{name}: must have come with the package, {folders[0]} is not there; install it anew"
    )
