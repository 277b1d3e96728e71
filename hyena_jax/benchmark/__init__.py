"""Time, memory and roofline of any mixer or model, measured only after it was found equal to its oracle."""
