"""The result of a check: one thing that would fail."""

from dataclasses import dataclass

WRITE_AGAIN = "write the folder again, or copy the file again"


@dataclass(frozen=True)
class Finding:
    """A rule that a file of the folder breaks, what was found there, and how to mend it."""

    file: str
    rule: str
    found: str
    mend: str

    def __str__(self) -> str:
        found = " ".join(self.found.split())
        return f"{self.file}: {self.rule}. Found: {found}. Mend: {self.mend}."
