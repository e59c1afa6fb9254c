"""What a check found."""

from dataclasses import dataclass

WRITE_AGAIN = "write the folder again, or copy the file again"


@dataclass(frozen=True)
class Finding:
    file: str
    rule: str
    found: str
    mend: str

    def __str__(self) -> str:
        found = " ".join(self.found.split())
        return f"{self.file}: {self.rule}. Found: {found}. Mend: {self.mend}."
