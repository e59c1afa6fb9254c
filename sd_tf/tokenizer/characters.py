"""Unicode as the `tokenizers` library knows it, as NumPy arrays: classes, lower case and NFC.

Every entry is asked of the library. Its tables are of another Unicode version than Python's
`unicodedata`, TensorFlow's regular expressions and its ICU, so that none of these could stand in.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers import Regex, normalizers

from sd_tf.tokenizer.clip import TokenizerError

CODE_POINTS = 0x110000
SURROGATES = range(0xD800, 0xE000)
SEPARATOR = "\n"  # between texts that are normalized in one call; no table has an entry for it
PAGE = 256
# A character's class. A new word starts where the class changes, and at every NUMBER.
SPACE, LETTER, OTHER, NUMBER = range(4)
# Marks of the lowest and of the highest combining class: what they change places with has one, too.
LOWEST_MARK, HIGHEST_MARK = "\u0334", "\u0345"


@dataclass(frozen=True)
class PagedTable:
    """One int32 for each number; pages of 256 numbers that are equal are stored once."""

    pages: np.ndarray  # (pages,): where in `values` a page begins
    values: np.ndarray  # (distinct pages * 256,)

    @classmethod
    def of(cls, values: np.ndarray) -> "PagedTable":
        distinct, index = np.unique(values.reshape(-1, PAGE), axis=0, return_inverse=True)
        pages = index.reshape(-1).astype("int32") * PAGE
        return cls(pages, distinct.reshape(-1).astype("int32"))


@dataclass(frozen=True)
class Composition:
    """Tables for NFC: a character's parts, the order of marks, and which pairs become one."""

    parts: np.ndarray  # (decompositions + 1, longest): code points, padded with -1; row 0 is empty
    part_of: np.ndarray  # (code points,): the character's row of `parts`, 0 if it has no parts
    order: np.ndarray  # (code points,): rank of the combining class, 0 for characters without one
    is_second: np.ndarray  # (code points,): whether it can join the character before it
    pairs: np.ndarray  # (compositions, 2), sorted
    composites: np.ndarray  # (compositions,): the one character that the pair becomes


@dataclass(frozen=True)
class Characters:
    """Properties of all code points, each an array of length `CODE_POINTS`."""

    classes: np.ndarray
    lower: np.ndarray  # the lower-case letter, or its first code point
    grown: dict[int, int]  # letter → the second code point of its lower case
    irregular: np.ndarray  # whether NFC or lower case may need more than the table `lower`
    composition: Composition


@functools.cache
def characters() -> Characters:
    """Read the tables off the library, which takes some seconds."""
    texts = _texts()
    lower, grown = _lower(texts)
    composition, changed = _composition(texts)
    irregular = changed | (composition.order > 0) | composition.is_second
    irregular[list(grown)] = True
    return Characters(_classes(texts), lower, grown, irregular, composition)


def _texts() -> list[str]:
    """Return each code point as a text, with an empty one for those that a text cannot hold."""
    missing = {*SURROGATES, ord(SEPARATOR)}
    return [chr(code) if code not in missing else "" for code in range(CODE_POINTS)]


def normalize(normalizer, texts: Iterable[str]) -> list[str]:
    """Normalize many texts with one call of the library."""
    return normalizer.normalize_str(SEPARATOR.join(texts)).split(SEPARATOR)


def changes(normalizer, texts: Sequence[str]) -> dict[int, str]:
    """Return what the characters become that the normalizer changes, by code point."""
    found = normalize(normalizer, texts)
    return {code: new for code, new in enumerate(found) if new != texts[code]}


def _classes(texts: Sequence[str]) -> np.ndarray:
    """Return the class by which the library's regular expressions tell a character."""
    classes = np.full(CODE_POINTS, OTHER)
    joined = "".join(texts)
    found = np.array([code for code in range(CODE_POINTS) if texts[code]])
    for pattern, kind in ((r"\p{L}", LETTER), (r"\p{N}", NUMBER), (r"\s", SPACE)):
        marked = normalizers.Replace(Regex(pattern), SEPARATOR).normalize_str(joined)
        classes[found[_codes(marked) == ord(SEPARATOR)]] = kind
    classes[ord(SEPARATOR)] = SPACE
    return classes


def _lower(texts: Sequence[str]) -> tuple[np.ndarray, dict[int, int]]:
    lower, grown = np.arange(CODE_POINTS), {}
    for code, text in changes(normalizers.Lowercase(), texts).items():
        _require(len(text) <= 2, f"U+{code:04X} is {len(text)} characters in lower case")
        lower[code] = ord(text[0])
        if len(text) == 2:
            grown[code] = ord(text[1])
    return lower, grown


def _composition(texts: Sequence[str]) -> tuple[Composition, np.ndarray]:
    """Return the tables, and for each code point whether NFC changes it."""
    changed = np.zeros(CODE_POINTS, bool)
    changed[list(changes(normalizers.NFC(), texts))] = True
    decomposed = changes(normalizers.NFD(), texts)
    # Parts.
    longest = max(map(len, decomposed.values()))
    parts = np.full((len(decomposed) + 1, longest), -1)
    part_of = np.zeros(CODE_POINTS, "int64")
    for row, (code, text) in enumerate(decomposed.items(), start=1):
        parts[row, : len(text)] = _codes(text)
        part_of[code] = row
    # Pairs: the last part joins what the others compose to.
    whole = [code for code in decomposed if not changed[code]]
    firsts = normalize(normalizers.NFC(), [decomposed[code][:-1] for code in whole])
    pairs = [first + decomposed[code][-1] for first, code in zip(firsts, whole, strict=True)]
    agree = normalize(normalizers.NFC(), pairs) == [texts[code] for code in whole]
    _require(agree and all(len(pair) == 2 for pair in pairs), "a composite is made otherwise")
    joins = sorted(zip(pairs, whole, strict=True))
    is_second = np.zeros(CODE_POINTS, bool)
    is_second[[ord(second) for _, second in pairs]] = True
    composition = Composition(
        parts.astype("int32"),
        part_of,
        _order([text for code, text in enumerate(texts) if not part_of[code]]),
        is_second,
        np.array([_codes(pair) for pair, _ in joins]),
        np.array([code for _, code in joins]),
    )
    return composition, changed


def _order(texts: Sequence[str]) -> np.ndarray:
    """Rank the combining classes of characters without parts by how NFD orders two marks."""
    texts = [text for text in texts if text]
    nfd = normalizers.NFD()
    between = [HIGHEST_MARK + text + LOWEST_MARK for text in texts]
    sorted_ = normalize(nfd, between)
    marks = [text for text, a, b in zip(texts, between, sorted_, strict=True) if a != b]

    def compare(one: str, other: str) -> int:
        return (nfd.normalize_str(one + other) != one + other) - (
            nfd.normalize_str(other + one) != other + one
        )

    order, rank, last = np.zeros(CODE_POINTS, "int64"), 0, None
    for mark in sorted(marks, key=functools.cmp_to_key(compare)):
        rank += last is None or compare(last, mark) != 0
        order[ord(mark)], last = rank, mark
    return order


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype("int64")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise TokenizerError(
            f"A lower-case letter must be at most two characters, and a composite must be made of "
            f"two. In the installed tokenizers {tokenizers.__version__}, {problem}. "
            "Install an older release."
        )
