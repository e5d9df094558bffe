"""`combination`: runs several drafters in one step."""

from slipstream.speculative.method import Method

METHOD = Method(
    name="combination", module="slipstream.speculative.combination.drafter", implied_by="drafters"
)
