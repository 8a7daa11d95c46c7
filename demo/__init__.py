"""The demonstration pair: grammar, training recipe and evaluation."""
