"""Network parts that know shapes and no device."""
