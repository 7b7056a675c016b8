"""Text for pictures, videos and prompts from Megatron weights, under any tensor x pipeline x expert layout.

``prompts`` turns conversations into prompts, ``run`` is what each process of the group does, ``command`` starts them.
"""
