"""The numbers of draft tokens that the policy chooses from."""

from collections.abc import Sequence

from slipstream.core.step_form import StepForm, StepLimits

# The values of K that graphs are captured for, besides the largest. They are close enough that
# padding to the next one costs little, and few, since each is captured for every bucket of requests
# at start-up.
_WIDTHS = (1, 2, 4, 7)
_NARROW = (1, 2, 3, 4)  # further values of K to choose from where steps are not captured
_MOST_SIZES = 4


def tree_sizes(most: int) -> tuple[int, ...]:
    """The numbers of nodes of trees, rising: `most`, a half of it, a quarter and an eighth."""
    sizes = {most >> halvings for halvings in range(_MOST_SIZES)}
    return tuple(sorted(sizes - {0}))


def captured_widths(limits: StepLimits) -> tuple[int, ...]:
    """The values of K that steps are captured for, rising from 0."""
    most = limits.num_speculative_tokens
    if limits.drafts_trees:
        return (0, *tree_sizes(most))
    return (0, *(width for width in _WIDTHS if width < most), most)


def chosen_widths(limits: StepLimits, widths: Sequence[int], form: StepForm) -> tuple[int, ...]:
    """The numbers of units (see `CostTable`) to choose from, rising from 0.

    Args:
        widths: those that steps are captured for.
    """
    if limits.drafts_trees:
        return (0, 1)
    if not form.ends_chains:
        return tuple(widths)
    return tuple(sorted({*_NARROW, *widths} & {*range(limits.num_speculative_tokens + 1)}))
