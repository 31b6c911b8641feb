# %% [markdown]
# # own_data_and_reward
#
# Text.

# %%
print(1)
