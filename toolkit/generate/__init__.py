"""Text for pictures, videos and prompts from Megatron weights, under any tensor x pipeline x expert layout.

``prompts`` turns conversations into prompts, ``worker`` is what each process of the group does, ``answers``
starts them.
"""
