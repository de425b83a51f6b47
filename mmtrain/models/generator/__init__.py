"""Image generators as torch modules: one module a layer of `models.generator_shapes`, and diffusion's arithmetic.

`dit_layers` holds the diffusion transformer, `unet_layers` the U-Net. `noise_schedules` adds noise and states targets;
`keyed_noise` draws noise and timesteps so that no plan changes them. Read `dit_layers` first.
"""
