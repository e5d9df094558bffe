"""The bundled demo pair: data only."""
