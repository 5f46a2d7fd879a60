#!/bin/sh
# Gives the kernels that were compiled with the image to numba where it can write, then runs the command. What lies there stays: on a
# CPU of another kind it is what that CPU has compiled for itself.
cp -R -n /opt/ecospec/kernels/. "$XDG_CACHE_HOME"/ || echo "Compiled kernels could not be copied to $XDG_CACHE_HOME; they are compiled again." >&2
exec "$@"
