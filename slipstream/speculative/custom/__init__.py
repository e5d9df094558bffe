"""`custom`: a class of the user's own."""

from slipstream.speculative.method import Method

METHOD = Method(
    name="custom", module="slipstream.speculative.custom.drafter", spellings=("custom_class",)
)
