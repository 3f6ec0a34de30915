"""The probe: repeats attention calls with other implementations and compares the results."""
