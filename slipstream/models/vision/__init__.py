"""Vision towers, which are transformers' own, and how models represent images in prompts."""
