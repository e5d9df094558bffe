"""What drafting heads share: checkpoints, configs, loading, drafters over features."""
