"""How the trio's EAGLE head and draft model were trained: prompts, generation, distillation."""
