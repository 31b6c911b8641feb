# %% [markdown]
# # postprocess_buffer
#
# Text.

# %%
print(1)
