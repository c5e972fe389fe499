"""Where the tokens of a row lie, for kernels: the same arithmetic as `Rows` describes."""

import triton
import triton.language as tl


@triton.jit
def read_units(ids: tl.tensor, step: tl.tensor, places: tl.tensor, room: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Units of a set's tokens at `places`, -1 past the `room` tokens of its buffer; of no meaning past the set's limit.

    Nothing is computed with them here: whoever carries them on does not wait for them yet.
    """
    return tl.load(ids + places // UNIT * step, mask=places < room, other=-1)


@triton.jit
def listed_tokens(
    units: tl.tensor, everything: tl.tensor, places: tl.tensor, limit: tl.tensor, UNIT: tl.constexpr
) -> tl.tensor:
    """Logical positions of a set's tokens at `places`; -1 where the set, of `limit` tokens, has no more."""
    tokens = tl.where(everything, places, tl.where(units >= 0, units * UNIT + places % UNIT, -1))
    return tl.where(places < limit, tokens, -1)


@triton.jit
def clamped_slots(tokens: tl.tensor, start: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Slots of positions clamped into the row, so that what is read for an invalid one is finite."""
    return start + tl.maximum(tl.minimum(tokens, length - 1), 0)


@triton.jit
def only_page(table: tl.tensor, step: tl.tensor, PAGE: tl.constexpr) -> tl.tensor:
    """Offset of the page of a row that has one (`PAGE` 0: its capacity may grow), else 0."""
    if PAGE == 0:
        return tl.load(table).to(tl.int64) * step
    else:  # Triton compiles one branch of an if that has an else, and both of one that has not
        return 0


@triton.jit
def storage_pages(table: tl.tensor, step: tl.tensor, slots: tl.tensor, PAGE: tl.constexpr) -> tl.tensor:
    """Storage pages of slots; of no meaning for rows of one page."""
    if PAGE == 0:
        return slots
    else:
        return tl.load(table + slots // PAGE * step)


@triton.jit
def storage_rows(
    pages: tl.tensor, slots: tl.tensor, page_step: tl.tensor, slot_step: tl.tensor, PAGE: tl.constexpr
) -> tl.tensor:
    """Offsets of tokens in the storage, or in a row's only page, int64."""
    if PAGE == 0:
        return slots.to(tl.int64) * slot_step
    else:
        return pages.to(tl.int64) * page_step + (slots % PAGE).to(tl.int64) * slot_step
