"""How much is drafted: what a step costs, what is accepted, and the choice that follows."""
