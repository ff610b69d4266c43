"""Rule files made of what other systems are set up with: lists of names, DeepSpeed's JSON, NVCaffe's prototxt."""
