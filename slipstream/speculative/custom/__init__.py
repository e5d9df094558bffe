"""`custom`: drafts with a Python class of the user."""

from slipstream.speculative.method import Method

METHOD = Method(
    name="custom", module="slipstream.speculative.custom.drafter", spellings=("custom_class",)
)
