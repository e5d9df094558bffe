"""DFlash: draft blocks over features of the target."""
