"""Time, memory and roofline share of mixers and models, measured only after they match their oracles."""
