"""What an hour of a GPU costs: ``rates.toml``, packaged, of the user, and of the repository.

The repository's file is asked first, then the user's, then the packaged one: the first that knows a GPU decides.
"""

from __future__ import annotations

import datetime as dt
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ..errors import RatesError
from ..gpu.specs import name_words
from .toml_files import read_toml

FILE_NAME = "rates.toml"
PACKAGED = Path(str(resources.files("flashmoe_science") / FILE_NAME))
_HINT = "the format is in docs/how-to/borrowed-gpus.md"


class _Rate(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    dollars_per_hour: float = Field(ge=0, allow_inf_nan=False, description="dollars an hour, a number of at least 0")
    source: str = Field(default="", description="where the price is from")
    date: dt.date | None = Field(default=None, description="the day on which it was read, e.g. 2026-11-20")


class _RatesFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: dict[str, _Rate] = Field(default={}, description="a table [gpu.NAME] for each GPU")
    other: dict[str, _Rate] = Field(default={}, description="a table [other.NAME] for whatever else costs by the hour")


@dataclass(frozen=True)
class Rate:
    """One price."""

    name: str
    dollars_per_hour: float
    source: str
    date: str
    file: Path


@dataclass(frozen=True)
class Rates:
    """All prices that are known here. Of each group, the one asked first comes first."""

    gpus: tuple[tuple[Rate, ...], ...] = ()
    others: tuple[Rate, ...] = ()  # charged besides, for every hour that a GPU is held

    def of_gpu(self, gpu: str) -> Rate | None:
        """Return the price of the GPU that the driver calls ``gpu``, or None where none is known.

        A name fits when all its words are in the GPU's; of several in one file, the one with the most words.
        """
        words = name_words(gpu)
        for file in self.gpus:
            fitting = [rate for rate in file if name_words(rate.name) <= words]
            if fitting:
                return max(fitting, key=lambda rate: len(name_words(rate.name)))
        return None

    def dollars_per_hour(self, gpu: str) -> float | None:
        """Return what an hour of ``gpu`` costs with all that is charged besides, or None where that is not known."""
        rate = self.of_gpu(gpu)
        return None if rate is None else rate.dollars_per_hour + sum(other.dollars_per_hour for other in self.others)


def rates_files(repository: Path | None) -> list[Path]:
    """Return the files that exist, the one asked first in front."""
    config_home = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification: a relative path is invalid and has to be ignored.
    config = Path(config_home) if Path(config_home).is_absolute() else Path.home() / ".config"
    files = [repository / FILE_NAME] if repository else []
    return [path for path in (*files, config / "flashmoe" / FILE_NAME) if path.exists()] + [PACKAGED]


def load_rates(repository: Path | None) -> Rates:
    """Return the prices that hold in ``repository``.

    Raises:
        RatesError: a file is wrong; names file, key and what was expected.
    """
    files = {path: read_toml(path, _RatesFile, RatesError, hint=_HINT) for path in rates_files(repository)}
    others: dict[str, Rate] = {}
    for path, file in files.items():
        for name, rate in file.other.items():
            others.setdefault(name, _rate(name, rate, path))
    gpus = tuple(tuple(_rate(name, rate, path) for name, rate in file.gpu.items()) for path, file in files.items())
    return Rates(gpus, tuple(others.values()))


def _rate(name: str, rate: _Rate, path: Path) -> Rate:
    date = rate.date.isoformat() if rate.date else ""
    return Rate(name, rate.dollars_per_hour, rate.source, date, path)
