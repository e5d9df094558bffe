"""What drafters on the host have in common: the device only gets their guesses."""

from collections.abc import Callable

from torch import Tensor

from slipstream.cache.spec import CacheLayout
from slipstream.core.batch import Batch
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits, DrafterResources, Needs


class HostDrafter:
    """All of the protocol but `prepare`, which guesses, and `forget`."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state

    def propose(self, batch: DeviceBatch) -> Draft:
        return Draft.of_guesses(batch)

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        """The next guess reads the committed tokens themselves."""

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        """The host knew the prompts before."""

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return self._state.num_computed[slots]


class LoadedHostDrafter:
    """A drafter on the host before it is built: it adds nothing to the cache."""

    limits = DrafterLimits(drafts_behind_prompt=True, on_device=False, looks_up=True)
    needs = Needs()
    layout: CacheLayout | None = None

    def __init__(self, make: Callable[[DeviceState], Drafter]) -> None:
        self._make = make

    def build(self, resources: DrafterResources) -> Drafter:
        return self._make(resources.state)
